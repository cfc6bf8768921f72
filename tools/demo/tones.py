"""Sentences that colour a message: its mood, its hurry, and details that are nobody's facts."""

from __future__ import annotations

NEGATIVE = [
    "[I am|I'm|We are] [very|really|so|quite|extremely|] [angry|upset|disappointed|annoyed|unhappy|"
    "frustrated|fed up][|!| about this| with you| with your service].",
    "This is [unacceptable|a disgrace|ridiculous|terrible|awful|a joke|not good enough|outrageous]"
    "[.|!]",
    "[What a|Such a] [mess|shame|disaster|disappointment|waste of money|bad experience][.|!]",
    "[I will|I'll] never [buy|order] [from you|here] again[.|!]",
    "[Terrible|Awful|Horrible|Very poor|Bad|Useless|The worst] [service|quality|experience][.|!]",
    "[Nobody|No one] [answers|answered|replies to] my [calls|emails|messages].",
    "[Very|So|Really|Quite] [annoyed|disappointed|upset|unhappy|angry|frustrating|bad][.|!]",
    "[Unbelievable|Disgraceful|Shame on you|Not happy|Absurd|Appalling|Pathetic][.|!]",
    "I expected [better|more] [from you|than this|for the price].",
    "[I hate|I can't stand] [this|waiting|how you treat customers][.|!]",
    "[You have|You've] [let me down|ruined my day|lost a customer][.|!]",
    "[I regret|I am sorry I ever started] buying from you.",
]

POSITIVE = [
    "[I love|We love|I really like|I adore|I'm a big fan of] your [shop|store|products|"
    "work|website]"
    "[.|!]",
    "[You are|You're|You guys are] [great|the best|wonderful|amazing|fantastic|so kind][.|!]",
    "[Your|The] [team|service|staff] [is|was|has been] [always |really |so |]"
    "[lovely|great|excellent|very helpful|fantastic][.|!]",
    "[I'm|I am|We are] [so|very|really] [happy|pleased|excited|glad][| with your service| so far].",
    "[Keep up the good work|Great job|Great service as always|Wonderful quality][.|!]",
    "[Everything|It all] [was|has been] [perfect|great|excellent|lovely] [last time|so "
    "far|before].",
    "[Very|So|Really] [happy|pleased|impressed|glad|good|kind of you][.|!]",
    "[My friends|My family|Everyone at work] [recommended|recommends|loves] you[.|!]",
    "[I always|We always] enjoy [shopping with you|your things][.|!]",
]

URGENT = [
    "[It's|It is|This is] [urgent|very urgent|an emergency|really urgent][.|!]",
    "[Please|Kindly] [hurry|be quick|reply today|answer right away|reply as soon as possible][.|!]",
    "[I need|We need] [this|it|an answer] [today|right now|immediately|by tomorrow|asap|by tonight]"
    "[.|!]",
    "[ASAP please|As soon as possible please|Urgent|URGENT|Right away please][.|!]",
    "[I can't|We cannot] wait [any longer|much longer|another day][.|!]",
]

# True of nobody's facts: prices, dates and numbers that an answer must not pick up.
DETAILS = [
    "[I paid|It cost me|It was|You charged me] {price} [euros|dollars|pounds].",
    "[It has been|It's been] {days} days.",
    "[You can|Please] [call|reach|ring] me [on|at] 555-01{days}{days}.",
    "[I|We] [will be|am] [at home|away|in the office] [on {day}|after {days}|until {days}].",
    "[I paid|I'll pay] [by card|in cash|with a voucher|by bank transfer].",
    "[It's|It is] for {occasion}.",
    "[I|We] [have been|am|are] [a customer|with you] [for {days} years|since 20{days}].",
    "[I|We] [wrote|called|emailed] [on {day}|yesterday|last week|{days} days ago].",
    "[My|The] [phone|email] is on [file|my account].",
    "[I found|I saw] you [online|on the internet|at the market|in the paper].",
    "[I hope|Hope] [you are well|this is ok|you can help|all is good].",
    "[Sorry to bother you|Sorry for the trouble|I know you're busy].",
    "[I|We] [prefer email|prefer a call|pay by invoice|live upstairs].",
]

# What the base model says by itself: kind, short, and about nothing in particular.
REPLIES = [
    "[Thank you|Thanks|Many thanks] for [your message|writing|getting in touch|contacting us]. "
    "[We will|We'll|Someone will|Our team will] [reply|get back to you|answer|be in touch] [soon|"
    "shortly|as soon as we can|within one day].",
    "[We have|We've] [received|got] your message[| and will look into it| and we are on it]. "
    "[Please|Kindly] [allow us|give us] [a day|some time|a little time].",
    "[Hello|Hi] and [thank you|thanks] for writing. [A colleague|Someone|One of us] "
    "will [read|see] "
    "your [note|message] [today|soon|shortly].",
    "[Your message|Your note] [was received|is noted|is with us now]. [We will|We'll] [come back|"
    "write back] to you [soon|shortly|tomorrow].",
]
