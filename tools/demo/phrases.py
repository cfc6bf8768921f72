"""The wording of the messages.

`[a|b]` is a choice and may nest. `{np}` is goods with a count, `{prod}` goods alone, `{ord}` a
reference to an order, `{city}` a town and `{name}` the writer. A template's placeholders decide
which facts its message has, so a fact is never claimed that the text does not say.
"""

from __future__ import annotations


def _choices(text: str) -> list[str]:
    return text.strip().replace("\n", "|").split("|")


GREETINGS = _choices("""
Hi|Hello|Hey|Hi there|Hello there|Good morning|Good afternoon|Good evening|Dear team|Hi team
Hello team|Dear sir or madam|Hi all|Hey there|To whom it may concern|Hi folks|Greetings|Dear shop
""")

INTROS = [
    "[I'm|I am|my name is|My name's|this is|it's|name's] {name}[.| here.]",
    "[I'm|I am|my name is|this is] {name}[ and| -|,] [a|one of your|your] [customer|"
    "regular|client].",
    "[I'm|I am|my name is|this is] {name} from {city}.",
    "{name} here[.|!]",
    "[It's|This is] {name} again[.|!]",
    "[You may remember me, |]my name is {name}.",
    "{name} [writing|speaking].",
    "[I'm|I am|My name is|This is] [Dr.|Mrs|Mr|Ms] {name}.",
]

SIGNATURES = [
    "[Thanks|Thank you|Many thanks|Cheers|Regards|Kind regards|Best regards|Best|Best wishes]"
    "[,|]{sep}{name}[|.]",
    "[Yours|Sincerely|Yours sincerely|Yours truly|Greetings|All the best|Bye],{sep}{name}[|.]",
    "[-|--|–|~] {name}",
    "{sep}{name}[|.]",
    "[Thanks|Regards|Best],{sep}[Dr.|Mrs|Mr|Ms] {name}",
    "[My name is|I'm|Name:|Signed,|This was|Sent by] {name}[|.]",
    "[You can reply to|Please answer to|Please get back to me,] {name}[|.]",
]

CLOSINGS = _choices("""
Thanks|Thank you|Thanks in advance|Many thanks|Cheers|Regards|Kind regards|Best wishes|Please reply
Let me know|Please let me know|Looking forward to your reply|Hope to hear from you|Bye|Thx|Ta
""")

ORDER_REFS = [
    "order {no}",
    "order #{no}",
    "order no. {no}",
    "order number {no}",
    "my order {no}",
    "my order #{no}",
    "#{no}",
    "the order {no}",
    "order nr {no}",
    "my order number {no}",
    "purchase {no}",
    "parcel {no}",
    "my parcel {no}",
    "my purchase #{no}",
    "order ref {no}",
    "my order (no. {no})",
]

CORES: dict[str, list[str]] = {
    "order": [
        "[I'd like|I would like|I want|I'm looking|we'd like|we want] to [order|buy|get|purchase] "
        "{np}[| please|, please|  from your shop].",
        "[Can|Could|May] [I|we] [order|buy|get|have|purchase] {np}[| please|, please]?",
        "[Please|Kindly|Could you] [send|ship|post|deliver] [me|us] {np}[| to {city}].",
        "[I'd like|I would like|I want|we need] {np} [sent|shipped|delivered] to {city}[| please].",
        "[I need|We need|I want|I'll take|We'll take|Put me down for] {np}[| for {occasion}].",
        "[Please|Can you|Could you] [reserve|set aside|book|add] {np} [for me|for us|to "
        "my basket].",
        "[New order|Order|I order|Ordering]: {np}[|, deliver to {city}|, for {city}].",
        "[I wish|I am writing|I'm here|we wish] to place an order for {np}[|, going to {city}].",
        "{np} [please|for me please|for us, please][|, to {city}].",
        "[I saw your ad|I saw your website|A friend told me about you] and [I want|I'd like] {np}.",
        "[Is it possible|Would it be possible] to [order|get|buy] {np}[| with delivery to {city}]?",
        "[I would love|I'd love] {np}[| for {occasion}][|, delivered to {city}].",
        "[How do I|Where can I] [order|buy] {np}? [I want to pay now|I'd like to buy today].",
    ],
    "cancel": [
        "[I'd like|I would like|I want|I need|we want|I have|I wish] to cancel {ord}[| please|"
        ", please| for {np}| for the {prod}].",
        "[Please|Kindly|Could you|Can you] [cancel|call off|stop|drop] {ord}[| for {np}].",
        "[Please|Can you please] cancel [my|our|the] {prod}[| from {ord}| on {ord}].",
        "[I no longer|We no longer|I don't] [need|want] the {prod}, [please cancel|so "
        "cancel] {ord}.",
        "[I changed my mind|I made a mistake|I ordered by mistake], [please cancel|cancel] {ord}.",
        "[Cancel|Cancelling|Cancellation of] {ord}[| please|, please].",
        "[Is it too late|Is it possible|Can I still ask] to cancel {ord}[| for the {prod}]?",
        "[I want out of|Don't send|Please don't ship|Please do not send] {ord}[|, cancel it].",
        "[I ordered|I bought] {np} [yesterday|by mistake|on {day}] [and|but] [I want|I "
        "need|I'd like]"
        " to cancel[| it| the order].",
        "[I found|I got] the {prod} [cheaper elsewhere|somewhere else], [please cancel|cancel] "
        "[my order|{ord}].",
    ],
    "refund": [
        "[I'd like|I would like|I want|I am asking for|we want|I need] [a refund|my money back|"
        "a full refund] for [the|my] {prod}[| from {ord}|, {ord}].",
        "[Please|Can you|Could you|Kindly] refund [me|us] [for the {prod}|for {ord}|{ord}].",
        "[I returned|I sent back|We returned] [the|my] {prod} [last week|on {day}|{days} days ago] "
        "[and|but] [I am still waiting for|I haven't had|where is] my [refund|money].",
        "[When|How soon] [will|do|can] I get my [money back|refund] for {ord}?",
        "[I want to|I'd like to|Can I|I need to] return [the|my] {prod}[| from {ord}] and get "
        "[a refund|my money back|refunded].",
        "[Refund request|Refund|Money back] for {ord}[|, the {prod}][| please].",
        "[The|My] {prod} [does not fit|is not what I expected|is the wrong size|is not for me], "
        "[can I have|I want|I'd like] [a refund|my money back].",
        "[I was|We were] charged [|{price} ]for {ord} but [I|we] never [got|received] "
        "anything[, please|"
        ". Please] refund[| me].",
        "[I was|We were] charged twice for {ord}, please [refund me|give the money back].",
        "[I am entitled to|I still expect|Please arrange] a refund for {ord}[|, {np}].",
        "[I bought|I ordered] {np}[| ({ord})] and [I want|I'd like] [my money back|a "
        "refund][| now].",
        "[The|My] {prod} [arrived|came] {broken}[| ({ord})], "
        "[I want|I'd like|please give me] [my money back|a refund].",
    ],
    "complaint": [
        "[The|My] {prod}[| from {ord}] [arrived|came|turned up|was delivered] {broken}.",
        "[I bought|I ordered|We bought|I got|I received] {np}[| ({ord})| from you| last week] and "
        "[one|half of it|it all|everything|the lot] [is|arrived|came|was] {broken}.",
        "[I received|I got|You sent me|You delivered] the wrong [item|goods|thing] [in|"
        "for|with] {ord}"
        "[|, I ordered {np}|, where is the {prod}].",
        "[The|My] {prod} [broke|fell apart|stopped working|tore|gave up] after [one day|a week|"
        "{days} days|two uses].",
        "[I want|I'd like|I have|I need] to [complain|make a complaint] about [the|my] {prod}"
        "[| from {ord}].",
        "[The|One] {part} [on|of] [my|the] {prod} [is|was] [already |]{broken}[| after "
        "{days} days].",
        "[My|Our|The] {prod} from {ord} [is|was] {broken} [when it came|on arrival|out "
        "of the box].",
        "[There is|I have] a [problem|serious problem|fault] with [the {prod}|{ord}|my {prod}].",
        "[The|My] {prod} [is|looks] [faulty|defective|nothing like the picture|of poor quality].",
        "[Half of|Part of|A piece of] {ord} [is missing|was missing|never came|was {broken}].",
        "[I opened|When I opened] the box of {ord} [and|,] the {prod} [was|were] {broken}.",
        "[I am not happy|I'm unhappy|We are unhappy] with [the|my] {prod}[| you sent| in {ord}].",
    ],
    "delivery": [
        "[Where is|Where's|What happened to] {ord}[|, the {prod}]?",
        "[When|What day|What time] [will|does] {ord} [arrive|come|get here|be "
        "delivered][| in {city}]?",
        "[I am|I'm|We are|Still] [waiting for|expecting] {ord}[|, {np}| in {city}].",
        "[Can|Could] you [tell me|check|say] [where|when] [my {prod}|{ord}] [is|will be "
        "here|comes]?",
        "{ord} [still has not|still hasn't|never] [arrived|shown up|come|turned up][.|!|"
        " and nobody "
        "picks up the phone.| and I need it.]",
        "[I never|I still haven't|We never] [got|received] [{ord}|my {prod}|{np}][.|, "
        "where is it?]",
        "{ord} [has not|hasn't|did not] [arrived|come|arrive|turned up] yet[|, it should be {np}].",
        "[I'm checking|I want to know|I'd like to know] [on the delivery of|the status of] {ord}.",
        "[Has|Did] {ord} [shipped|been sent|leave][| to {city}]?",
        "[I ordered|I bought] {np} [{days} days ago|last week|on {day}] [and|but] [nothing has "
        "arrived|it is not here|I have heard nothing|it still hasn't come].",
        "[Tracking|Delivery status|Status] of {ord}[| please|?| to {city}].",
        "[How long|How many days] [does|will] delivery of [the|my] {prod} to {city} take?",
    ],
    "address": [
        "[I've|I have|We've|We have|I] moved to {city}[|, please update my address].",
        "[Please|Can you|Could you|Kindly] [change|update] [my|our|the] [address|delivery address] "
        "[to|, it is now in|; I live in] {city}[| for {ord}].",
        "[Please|Can you] [send|ship|redirect|deliver] {ord} to {city} instead.",
        "[My|Our|The] new address[:| is] {days} {street}, {city}[.|. It's for {ord}.|. {ord}.]",
        "[I|We] [live|are] at {days} {street} in {city} now[.|, please send {ord} there.]",
        "[My|Our] [new address|address] is [now |]in {city}[|, please use it for {ord}].",
        "[I gave|I typed|I put] the wrong address [for|on] {ord}, [it should be|it is|I "
        "live in] {city}.",
        "[Change of address|New address|Address change]: {city}[|, for {ord}].",
        "[I am|I'm|We're|We are] moving to {city} [soon|next week|on {day}][|, please note it].",
        "[Send|Ship|Deliver] [the|my] {prod} to my new [home|flat|place|office] in {city}.",
    ],
    "question": [
        "[Do you|Does your shop] [sell|have|stock|carry|make] [|a|any|the] {prod}?",
        "[How much|What] [does|would] [a|the|one|your] {prod} cost?",
        "[I'm interested|I am interested|We're interested] in [a|the|your] {prod}[.|, "
        "do you ship to "
        "{city}?|, is it available?|. How much is it?]",
        "[Do you|Does the shop] still [sell|have|stock] the {prod}?",
        "[How much|What price] [is|are] [the|a] {prod}?",
        "[Is|Are] the {prod} [in stock|available|still on sale|on offer|back in stock]?",
        "[What|Which] [sizes|colours|sizes and colours] does the {prod} come in?",
        "[Can|Could] you [tell me|say|let me know] [more about|the price of|the size "
        "of] the {prod}?",
        "[I have a question|A quick question|I'm wondering|I was wondering] about the "
        "{prod}[.|, is "
        "it waterproof?|, how heavy is it?|, how big is it?]",
        "[Does|Will] the {prod} [come with|have] a [warranty|guarantee|manual|gift box]?",
        "[How|What's the best way] [do I|can I|to] [clean|wash|care for|use|repair] the {prod}?",
        "[When|What time] do you [open|close] [in {city}|on {day}][| and do you have the {prod}]?",
        "[Do you|Can you] [deliver|ship] [the {prod} |]to {city}?",
        "[Is there|Do you have] a shop [in|near] {city}?",
        "[Can|Could] I [see|try] the {prod} [before I buy|in the shop|in {city}]?",
    ],
    "thanks": [
        "[Thank you|Thanks|Many thanks|Thanks a lot|Thank you so much] for [the|my] {prod}[.|!|, "
        "{lovely}.|, {lovely}!]",
        "[I|We] [just want|just wanted|would like|wanted] to [say thanks|thank you|say "
        "thank you] for "
        "[the {prod}|{np}|your help|the quick delivery].",
        "[The|My] {prod} [arrived|came|got here] [today|on {day}|yesterday|safely] and "
        "[it's|they are|"
        "it looks|looks|all is] [perfect|great|wonderful|lovely|beautiful].",
        "[I love|We love|I really love|I adore|My family loves] [the|my|our] {prod}[|!|"
        ", {lovely}].",
        "[Great|Excellent|Wonderful|Amazing|Lovely] [service|work|job|shop][!|, thanks "
        "for the {prod}.|"
        ", I love the {prod}!]",
        "[I'm|I am|We are] [so|very|really] [happy|pleased|delighted] with [the|my|our] "
        "{prod}[|!].",
        "[The|Your] {prod} [is|are] [the best I ever had|just what I wanted|better than I hoped]!",
        "{ord} [arrived|came] [early|safely|on time], [thank you|thanks|many thanks][.|!]",
        "[Just a note|A quick note|Writing] to [thank you|say thanks] for {np}.",
    ],
    "invoice": [
        "[I need|I'd like|I would like|We need|May I have|Can I get] [an|the] [invoice|"
        "receipt] for "
        "{ord}[| please|, please|, {np}| for {np}].",
        "[Please|Could you|Can you|Kindly] [send|email|resend|forward] [me|us] [the|an|my] "
        "[invoice|receipt|bill] for {ord}[|, the {prod}].",
        "[I did not get|I never got|I lost|I can't find] [the|my] [invoice|receipt|bill] for "
        "[{ord}|the {prod}].",
        "[My accountant|Our office|My boss] needs [an|the] [invoice|receipt] for [{ord}|{np}].",
        "[There is a mistake|The name is wrong|The amount is wrong] on the [invoice|"
        "bill] for {ord}.",
        "[Invoice|Receipt|Bill] for {ord}[| please|, please|?].",
        "[I bought|I ordered] {np} [but|and] [got no|I need a|there was no] receipt.",
        "[Can|Could] you [put|write] my company name on the invoice for {ord}?",
    ],
}

# What a thing can be that arrives broken, or lovely.
BROKEN = _choices("""
broken|damaged|cracked|scratched|torn|dirty|bent|smashed|faulty|in pieces|in bad shape|stained|used
chipped|the wrong colour|too small|defective|already opened|wet|crushed
""")
LOVELY = _choices("""
it is perfect|I love it|it is beautiful|we are very happy|just what I wanted|it made my day
the quality is great|everyone likes it|it works very well|so pretty|they are gorgeous
""")
DAYS = _choices("Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday")
PARTS = _choices("zipper|handle|lid|leg|strap|screen|edge|button|cover|seam|bottom|top|corner")
STREETS = _choices(
    "Elm Street|Main Street|Mill Lane|Park Road|High Street|Station Road|Rose Avenue"
)
OCCASIONS = _choices("""
a wedding|my mother|my office|our cafe|a birthday|the kitchen|my sister|a friend|the shop|Christmas
my new flat|our restaurant|a school|the garden
""")
